"""The HTTP application and its server: what faces the internet."""
