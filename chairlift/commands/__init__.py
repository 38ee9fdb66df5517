"""Commands that ask a folder, a name of the Hub, or a server: check, why, top, timeline, record and chat."""
