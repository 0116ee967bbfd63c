"""What some metrics need besides captions: the words for objects, and the objects in images."""
