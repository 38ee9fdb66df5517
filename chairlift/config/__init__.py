"""Every setting: of models, of the server, of `chairlift run`; from files, flags and the environment."""
