"""What is run on an emulated ARM board (`launch/arm64`) and compared with the machine that emulates it."""
