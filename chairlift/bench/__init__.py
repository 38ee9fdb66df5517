"""`chairlift bench`: what this machine, this model and these strategies do."""
