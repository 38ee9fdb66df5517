"""What would happen: the production schedulers in virtual time, on a machine that was measured."""
