"""The HTTP interface: the requests it accepts and the application that serves them."""
