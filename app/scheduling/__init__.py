"""Which requests run when. Nothing here knows of engines, HTTP, or any other package of ours."""
