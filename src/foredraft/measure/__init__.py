"""What speculation does to your own traffic: measure it, check that it changes nothing, be advised.

Against engines in this process, or servers by URL.
"""
