"""The head's mind while it answers: requests and their trees, what is in flight, drafters, what a slot
costs."""
