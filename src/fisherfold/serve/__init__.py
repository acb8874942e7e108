"""An HTTP service over a saved completion model: ``fisherfold serve model/``.

Needs ``pip install 'fisherfold[serve]'``. ``store`` keeps the model that answers and exchanges it
when its folder is replaced; ``app`` holds the endpoints; ``limits`` keeps a busy or hostile world
out; ``run`` starts the server; the ``page`` is what people see at /.
"""
