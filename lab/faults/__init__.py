"""A cluster that fails: devices that crash, stop and return, connections that break, a head that forms
pipeline after pipeline."""
