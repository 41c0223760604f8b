"""Deploy the server by another program than its own command; each module imports that program."""
