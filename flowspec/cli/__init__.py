"""The commands, one small file each: they read flags, call the layers below, and show the outcome."""
