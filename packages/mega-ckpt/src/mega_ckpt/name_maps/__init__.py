"""Map parameter names and boxes of other programs to those of Mega."""
