"""How fast is it, and how fast could it be on this device?"""
