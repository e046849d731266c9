"""Copies between a device and host memory: which storage travels when, and on which stream."""
