"""Exports networks to Keras, TensorFlow, ONNX, torchvision and keras.applications, and compares their outputs."""
