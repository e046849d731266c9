"""Techniques that save memory when training an LLM: readable, from scratch, with the bytes they promise and take."""
