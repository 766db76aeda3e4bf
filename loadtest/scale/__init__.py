"""What Convoy costs behind Ray Serve, in every form, beside `convoy serve` alone: CPU time by request."""
