"""HTTP itself: the application, bodies, errors, keys, and the short way for small requests."""
