"""HTTP itself: connections, requests and their answers, errors, keys, origins, TLS, the documentation."""
