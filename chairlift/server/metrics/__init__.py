"""What a server counts and times.

Metrics for Prometheus, and the last steps and calls for the timeline, the live page and the twin.
"""
