"""`chairlift bench` and `chairlift plan`: what this machine, this model and these strategies do, and would do."""
