"""Models of speed, communication and accuracy, and the numbers that the papers published; no
TensorFlow.
"""
