"""The web page of the server: a client of the OpenAI-compatible API that runs in the browser."""
