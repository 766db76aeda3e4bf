"""Pages for people: HTML and SVG that need nothing but themselves, and know nothing of what they show.

It lies here because export, the load tester and the campaign all draw, and what is common to them is below all of
them: this room imports none of ours.
"""
