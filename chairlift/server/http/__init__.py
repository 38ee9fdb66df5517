"""HTTP itself: the application, requests and their answers, errors, the documentation, and the short way."""
