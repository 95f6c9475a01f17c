"""Delivery: from the writers' channels, through batches, to one lane per backend.

One invariant holds whatever fails: a batch has its final number and bytes in
something that survives the process (the journal, or the black box in shared
memory) before any lane sees it, and recovery never numbers anew what a backend
may have. Where a machine offers neither, memory is all there is: lanes are
served from it, and nothing of it is numbered a second time.
"""
