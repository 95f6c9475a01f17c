/* Part of probing.c: the hooks of modules and of tensors. */

static int64_t next_hook = -1;

static PyObject *s_failed, *s_was_called, *s_requires_grad, *s_grad_fn, *s_backward_hooks,
    *s_register_hook_dict, *s_training;

typedef struct {
    PyObject_HEAD
    Tape *tape;
    PyObject *probed, *site, *module, *calls, *find_units;
    int layout;
    char was_called;
    Limits limits[DTYPES];
} Call;

typedef struct {
    PyObject_HEAD
    Tape *tape;
    PyObject *probed, *site;
    long long call_index, micro_batch, fired;
} Gradient;

/* ---- Gradients. ---- */

static int gradient_traverse(PyObject *self, visitproc visit, void *arg)
{
    Gradient *gradient = (Gradient *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(gradient->tape);
    Py_VISIT(gradient->probed);
    Py_VISIT(gradient->site);
    return 0;
}

static int gradient_clear(PyObject *self)
{
    Gradient *gradient = (Gradient *)self;
    Py_CLEAR(gradient->tape);
    Py_CLEAR(gradient->probed);
    Py_CLEAR(gradient->site);
    return 0;
}

static void gradient_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    gradient_clear(self);
    release(self);
}

static int is_none(PyObject *function)
{
    PyObject *answer = PyObject_CallNoArgs(function);
    Py_XDECREF(answer); /* None and the two truths are immortal enough to be compared */
    return answer ? answer == Py_None : -1;
}

static int has_failed(PyObject *site)
{
    PyObject *failed = PyObject_GetAttr(site, s_failed);
    Py_XDECREF(failed);
    return failed ? failed != Py_False : -1;
}

/* take(gradient) -> whether there is nothing left to do */
static PyObject *gradient_take(PyObject *self, PyObject *tensor)
{
    Gradient *gradient = (Gradient *)self;
    Tape *tape = gradient->tape;
    View view;
    int64_t count;
    int dtype, answer;
    if (tape && !tape->is_open) tape->late++;
    if (!tape || !tape->is_open) Py_RETURN_TRUE;
    int64_t began = clock_ns(CLOCK_MONOTONIC);
    if ((answer = has_failed(gradient->site)) < 0) return NULL;
    if (answer) Py_RETURN_TRUE;
    if ((answer = is_none(get_tracing)) < 0) return NULL;
    if (!answer) Py_RETURN_FALSE;
    if ((answer = look_at(tensor, &view, &count, &dtype)) < 0) return NULL;
    if (!answer) Py_RETURN_FALSE;
    Row meta = {.site = gradient->site,
                .call_index = gradient->call_index,
                .micro_batch = gradient->micro_batch,
                .fired = gradient->fired++};
    tape->saw_backward = 1;
    Py_INCREF((PyObject *)tape);
    answer = read_tensor(tape, tensor, &view, count, dtype, &tape->gradient_limits[dtype], NO_UNITS, meta);
    tape->spent_ns += clock_ns(CLOCK_MONOTONIC) - began;
    Py_DECREF((PyObject *)tape);
    if (answer) return NULL;
    Py_RETURN_TRUE;
}

static PyObject *gradient_count_firing(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLongLong(((Gradient *)self)->fired++);
}

static PyMemberDef gradient_members[] = {
    {"probed", T_OBJECT_EX, offsetof(Gradient, probed), READONLY, NULL},
    {"site", T_OBJECT_EX, offsetof(Gradient, site), READONLY, NULL},
    {"call_index", T_LONGLONG, offsetof(Gradient, call_index), READONLY, NULL},
    {"micro_batch", T_LONGLONG, offsetof(Gradient, micro_batch), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef gradient_methods[] = {
    {"take", gradient_take, METH_O, "Read a gradient; False where Python must."},
    {"count_firing", gradient_count_firing, METH_NOARGS, "How often it was called before."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot gradient_slots[] = {
    {Py_tp_doc, "Takes the gradients of one tensor; made by a Call."},
    {Py_tp_dealloc, gradient_dealloc},
    {Py_tp_traverse, gradient_traverse},
    {Py_tp_clear, gradient_clear},
    {Py_tp_members, gradient_members},
    {Py_tp_methods, gradient_methods},
    {0, NULL},
};

static PyType_Spec gradient_spec = {"quark_torch.kernels.probing.Gradient", sizeof(Gradient), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                                    gradient_slots};

/* As torch.Tensor.register_hook does, of a tensor that is no leaf. Its keys count up from 0,
   ours down from -1, so that none is there twice. */
static int register_hook(PyObject *tensor, PyObject *grad_fn, PyObject *hook)
{
    PyObject *hooks = PyObject_GetAttr(tensor, s_backward_hooks), *key = NULL, *done = NULL;
    int failed = -1;
    if (!hooks) return -1;
    if (hooks == Py_None) {
        Py_DECREF(hooks);
        if (!(hooks = PyObject_CallNoArgs(ordered_dict))) return -1;
        if (PyObject_SetAttr(tensor, s_backward_hooks, hooks)) goto end;
        done = PyObject_CallMethodObjArgs(grad_fn, s_register_hook_dict, tensor, NULL);
        if (!done) goto end;
    }
    if ((key = PyLong_FromLongLong(next_hook--))) failed = PyObject_SetItem(hooks, key, hook);
end:
    Py_XDECREF(done);
    Py_XDECREF(key);
    Py_DECREF(hooks);
    return failed;
}

static int follow_gradient(Call *call, PyObject *tensor, PyObject *grad_fn, int64_t index, int64_t micro_batch)
{
    Tape *tape = call->tape;
    if (!tape->gradient_type) return 0;
    Gradient *gradient = (Gradient *)PyType_GenericAlloc((PyTypeObject *)tape->gradient_type, 0);
    if (!gradient) return -1;
    gradient->tape = (Tape *)Py_NewRef((PyObject *)tape);
    gradient->probed = Py_NewRef(call->probed);
    gradient->site = Py_NewRef(call->site);
    gradient->call_index = index;
    gradient->micro_batch = micro_batch;
    int failed = register_hook(tensor, grad_fn, (PyObject *)gradient);
    Py_DECREF(gradient);
    return failed;
}

/* ---- Calls of a module. ---- */

static int call_traverse(PyObject *self, visitproc visit, void *arg)
{
    Call *call = (Call *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(call->tape);
    Py_VISIT(call->probed);
    Py_VISIT(call->site);
    Py_VISIT(call->module);
    Py_VISIT(call->calls);
    Py_VISIT(call->find_units);
    return 0;
}

static int call_clear(PyObject *self)
{
    Call *call = (Call *)self;
    Py_CLEAR(call->tape);
    Py_CLEAR(call->probed);
    Py_CLEAR(call->site);
    Py_CLEAR(call->module);
    Py_CLEAR(call->calls);
    Py_CLEAR(call->find_units);
    return 0;
}

static void call_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    call_clear(self);
    release(self);
}

/* Whether everything around is ordinary; says whether gradients will be wanted. */
static int is_ordinary(int *grad_enabled)
{
    int answer;
    if ((answer = is_none(get_tracing)) != 1 || (answer = is_none(peek_transforms)) != 1) return answer;
    PyObject *mode = PyObject_CallNoArgs(has_function_mode);
    Py_XDECREF(mode);
    if (mode != Py_False) return mode ? 0 : -1;
    PyObject *task = PyObject_CallNoArgs(get_graph_task);
    if (!task) return -1;
    long number = PyLong_AsLong(task);
    Py_DECREF(task);
    if (number != -1) return 0;
    if (PyErr_Occurred()) return -1;
    PyObject *enabled = PyObject_CallNoArgs(is_grad_enabled);
    Py_XDECREF(enabled);
    *grad_enabled = enabled == Py_True;
    return enabled ? 1 : -1;
}

/* The function that a tensor is from: 1 with one, 0 without need of one, 2 of a leaf. */
static int find_function(PyObject *tensor, PyObject **grad_fn)
{
    PyObject *requires_grad = PyObject_GetAttr(tensor, s_requires_grad);
    Py_XDECREF(requires_grad);
    if (!requires_grad) return -1;
    if (requires_grad != Py_True) return 0;
    if (!(*grad_fn = PyObject_GetAttr(tensor, s_grad_fn))) return -1;
    if (*grad_fn != Py_None) return 1;
    Py_CLEAR(*grad_fn);
    return 2;
}

/* The dimension that a function of Python gives, or NO_UNITS. */
static int ask_unit_dim(PyObject *find_units, PyObject *tensor, int dims, int64_t *unit_dim)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(find_units, tensor, NULL);
    if (!answer) return -1;
    if (answer != Py_None) {
        *unit_dim = PyLong_AsLongLong(answer);
        if (!PyErr_Occurred() && (*unit_dim < 0 || *unit_dim >= dims))
            PyErr_SetString(PyExc_IndexError, "the units are in no dimension");
    }
    Py_DECREF(answer);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether the model is in eval mode, where that matters. */
static int is_evaluating(const Tape *tape)
{
    PyObject *model = tape->trained ? PyWeakref_GetObject(tape->trained) : NULL;
    if (!model || model == Py_None) return 0;
    Py_INCREF(model);
    PyObject *training = PyObject_GetAttr(model, s_training);
    Py_DECREF(model);
    Py_XDECREF(training);
    return training ? training == Py_False : -1;
}

/* take(module, output) -> whether there is nothing left to do */
static PyObject *call_take(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Call *call = (Call *)self;
    Tape *tape = call->tape;
    View view;
    int64_t count;
    int dtype, answer, grad_enabled = 0, follows = 0;
    PyObject *grad_fn = NULL;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "take(module, output)");
        return NULL;
    }
    PyObject *module = args[0], *tensor = args[1];
    if (!tape || !tape->is_open) Py_RETURN_TRUE;
    if ((PyObject *)Py_TYPE(tensor) != tensor_type || PyWeakref_GetObject(call->module) != module)
        Py_RETURN_FALSE;
    int64_t began = clock_ns(CLOCK_MONOTONIC);
    if ((answer = has_failed(call->site)) < 0) return NULL;
    if (answer) Py_RETURN_TRUE;
    /* Without gradients it may be an evaluation, or the first call of a checkpoint. */
    if ((answer = is_ordinary(&grad_enabled)) != 1) goto leave;
    if ((answer = is_evaluating(tape)) < 0) goto leave;
    if (answer) {
        tape->evaluations++;
        tape->spent_ns += clock_ns(CLOCK_MONOTONIC) - began;
        Py_RETURN_TRUE;
    }
    if (!grad_enabled && (tape->backward || tape->trained)) goto leave;
    if ((answer = look_at(tensor, &view, &count, &dtype)) != 1)
        goto leave;
    if (tape->backward) {
        follows = answer = find_function(tensor, &grad_fn);
        if (answer < 0 || answer == 2) goto leave;
    }
    /* From here on it is ours. */
    if (tape->saw_backward) {
        tape->saw_backward = 0;
        tape->micro_batch++;
    }
    if (!call->was_called) {
        if (PyObject_SetAttr(call->site, s_was_called, Py_True)) goto fail;
        call->was_called = 1;
    }
    tape->calls++;
    PyObject *number = PyIter_Next(call->calls);
    if (!number) goto fail;
    int64_t index = PyLong_AsLongLong(number), micro_batch = tape->micro_batch;
    Py_DECREF(number);
    if (index == -1 && PyErr_Occurred()) goto fail;
    if (index >= tape->max_calls) {
        tape->surplus++;
        tape->spent_ns += clock_ns(CLOCK_MONOTONIC) - began;
        Py_XDECREF(grad_fn);
        Py_RETURN_TRUE;
    }
    if (tape->forward) {
        Row meta = {.site = call->site, .call_index = index, .micro_batch = micro_batch, .is_forward = 1};
        int64_t unit_dim = NO_UNITS;
        if (!call->find_units) unit_dim = choose_unit_dim(&view, count, call->layout);
        else if (view.ndim > 1 && ask_unit_dim(call->find_units, tensor, view.ndim, &unit_dim)) goto fail;
        if (read_tensor(tape, tensor, &view, count, dtype, &call->limits[dtype], unit_dim, meta)) goto fail;
    }
    if (follows && follow_gradient(call, tensor, grad_fn, index, micro_batch)) goto fail;
    Py_XDECREF(grad_fn);
    tape->spent_ns += clock_ns(CLOCK_MONOTONIC) - began;
    Py_RETURN_TRUE;
leave:
    if (answer < 0 && leave()) return NULL;
    Py_RETURN_FALSE;
fail:
    Py_XDECREF(grad_fn);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "the calls of a module cannot be counted");
    return NULL;
}

static PyMemberDef call_members[] = {
    {"probed", T_OBJECT_EX, offsetof(Call, probed), READONLY, NULL},
    {"site", T_OBJECT_EX, offsetof(Call, site), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* make_call(probed, site, module, calls, find_units, limits); `module` is a weak reference,
   `find_units` a layout, or a function from a tensor to a dimension or None */
static PyObject *tape_make_call(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Tape *tape = (Tape *)self;
    char *bytes;
    Py_ssize_t size;
    if (given != 6 || !tape->call_type || !PyWeakref_CheckRef(args[2]) || !PyIter_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "make_call() got something else");
        return NULL;
    }
    long layout = ASKED;
    if (!PyCallable_Check(args[4])) layout = PyLong_AsLong(args[4]);
    if ((layout == -1 && PyErr_Occurred()) || PyBytes_AsStringAndSize(args[5], &bytes, &size)) return NULL;
    Call *call = (Call *)PyType_GenericAlloc((PyTypeObject *)tape->call_type, 0);
    if (!call) return NULL;
    call->tape = (Tape *)Py_NewRef(self);
    call->probed = Py_NewRef(args[0]);
    call->site = Py_NewRef(args[1]);
    call->module = Py_NewRef(args[2]);
    call->calls = Py_NewRef(args[3]);
    call->layout = (int)layout;
    if (PyCallable_Check(args[4])) call->find_units = Py_NewRef(args[4]);
    if (take_limits(call->limits, bytes, size)) Py_CLEAR(call);
    return (PyObject *)call;
}

static PyMethodDef call_methods[] = {
    {"take", (PyCFunction)(void (*)(void))call_take, METH_FASTCALL,
     "Read what a module gave; False where Python must."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot call_slots[] = {
    {Py_tp_doc, "Takes what one module gives in one probed step."},
    {Py_tp_dealloc, call_dealloc},
    {Py_tp_traverse, call_traverse},
    {Py_tp_clear, call_clear},
    {Py_tp_members, call_members},
    {Py_tp_methods, call_methods},
    {0, NULL},
};

static PyType_Spec call_spec = {"quark_torch.kernels.probing.Call", sizeof(Call), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                                call_slots};
