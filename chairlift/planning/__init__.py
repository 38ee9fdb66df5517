"""`chairlift plan`: measures a model or asks a server, and tells in words what the planner in `plan` finds."""
