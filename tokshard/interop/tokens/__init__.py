"""Documents that other tools have tokenized: a module for each format, with a function that reads a part of a file.

A reader takes a store, the name of a file and a range of its bytes, and yields `TokenBatch`es: all documents whose
first byte is in the range, in order. So any process can read any range, and all ranges together give every document
once. Nothing is unpickled, and nothing is allocated by a number that the size of the file does not confirm.
"""
