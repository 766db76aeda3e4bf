"""Images with boxes or masks, in the forms in which people have them: COCO, YOLO, Pascal VOC, and folders of masks."""
