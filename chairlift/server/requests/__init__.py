"""What is told of single requests: where they are, why, and the timeline of the last minute."""
