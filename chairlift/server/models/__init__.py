"""The models of a server: hosted, loaded, found by name, and the services in front of them."""
