"""Tests of linpix/: those of linpix/ROOM/FILE.py are in ROOM/test_FILE.py here.

Files without a test of their own name, and where they are tested:
  __main__                    test_main.py
  cli/output                  cli/test_commands.py
  cli/train                   test_python_door.py

Tests that are not about one file:
  test_python_door.py         load, sample, complete, score, train and evaluate from Python
"""
