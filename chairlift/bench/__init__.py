"""`chairlift bench`: measure this machine, this model, these strategies."""
