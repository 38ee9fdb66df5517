"""The server as it is at this moment, for people who watch: what the live page shows, and the page itself."""
