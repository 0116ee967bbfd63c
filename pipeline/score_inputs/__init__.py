"""What some metrics need besides captions: the words for objects, the objects in images, and encoders."""
