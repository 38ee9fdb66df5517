"""What a model folder says of itself, without torch: its family, its task, the files beside the weights."""
