"""Journals of answers, by which another head goes on where one was ended."""
