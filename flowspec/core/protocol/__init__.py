"""What devices say to each other: messages, the checks they make of their fields, and every limit. Imports
nothing of the cores that speak them."""
