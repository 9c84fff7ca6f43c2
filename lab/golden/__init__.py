"""What must not change while the code is rebuilt: recorded once, and compared with what the code does now.

README.md in this folder says how they are used.
"""
