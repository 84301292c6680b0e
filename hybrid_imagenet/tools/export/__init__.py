"""Trained networks as files for Keras, TensorFlow, ONNX, torchvision and keras.applications; each is compared."""
