"""The simulator beside a server: what its traffic would have been with other settings, and the tuner that asks."""
