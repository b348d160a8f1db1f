"""Drafts: a cheap version of the model writes tokens ahead, and one exact pass verifies them all."""
