"""Islands: groups of near devices, each with a plan and a session of its own, joined by an outer optimizer.

Here are the division of devices and batches, the membership of a run, the layout and the programs of the outer step
(pure), and the session that presents all islands as one, with the supervisor of their losses. What an island does
inside is that of any run: see :mod:`onebox.engine.session`.
"""
