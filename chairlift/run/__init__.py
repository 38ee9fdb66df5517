"""`chairlift run`: the models of a server with no server around them, and one file from its first line to its last."""
