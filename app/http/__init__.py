"""HTTP/1.1: the guard around connections, the hot routes as plain ASGI, FastAPI for the rest, and the page."""
