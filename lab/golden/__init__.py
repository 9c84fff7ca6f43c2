"""What must not change while the code is rebuilt: recorded once, and compared with what the code does now.

See README.md beside this file.
"""
