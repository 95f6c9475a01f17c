/* Part of probing.c: what the hooks of one probed step have read. */

#define ROWS 64

typedef struct {
    Result result;
    PyObject *site;
    int64_t time_us, call_index, micro_batch, fired, count, units;
    int64_t shape[DIMS];
    int32_t ndim;
    int32_t is_forward;
} Row;

typedef struct {
    PyObject_HEAD
    PyObject *order, *emit, *call_type, *gradient_type;
    PyObject *trained; /* a weak reference to the model, or NULL where all calls are taken */
    Measure measure;
    Row **pages;
    Py_ssize_t used, page_count;
    long long spent_ns, calls, micro_batch, evaluations, surplus, late, max_calls;
    int level;
    char is_open, saw_backward, forward, backward;
    Limits gradient_limits[DTYPES];
} Tape;

static PyTypeObject *tape_type, *gradient_type, *call_type;

static PyObject *tape_make_call(PyObject *self, PyObject *const *args, Py_ssize_t given);

static int64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void release(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static Row *add_row(Tape *tape)
{
    Py_ssize_t page = tape->used / ROWS;
    if (page == tape->page_count) {
        Row **pages = realloc(tape->pages, (size_t)(page + 1) * sizeof *pages);
        if (!pages) goto full;
        tape->pages = pages;
        if (!(pages[page] = malloc(ROWS * sizeof(Row)))) goto full;
        tape->page_count++;
    }
    Row *row = &tape->pages[page][tape->used % ROWS];
    row->site = NULL;
    tape->used++;
    return row;
full:
    PyErr_NoMemory();
    return NULL;
}

/* Reads a tensor into a row, and puts it in the order of what the step has read. */
static int read_tensor(Tape *tape, PyObject *tensor, const View *view, int64_t count, int dtype,
                       const Limits *limits, int64_t unit_dim, Row meta)
{
    Py_ssize_t index = tape->used;
    Row *row = add_row(tape);
    if (!row) return -1;
    *row = meta;
    Py_INCREF(row->site);
    row->time_us = clock_ns(CLOCK_REALTIME) / 1000;
    row->count = count;
    row->units = NO_UNITS;
    row->ndim = view->ndim;
    if (view->ndim) memcpy(row->shape, view->shape, (size_t)view->ndim * sizeof *row->shape);
    Job job = {view->data, NULL, count, dtype, limits->wanted, limits->near_zero, limits->low,
               limits->high, 0, 0, 0, limits->near_zero_bits};
    if (unit_dim != NO_UNITS) {
        row->units = job.units = view->shape[unit_dim];
        job.inner = job.units == 1 ? count : view->strides[unit_dim];
        job.outer = count / (job.units * job.inner);
    }
    if (count < FEW) {
        tape->measure(&job, &row->result, 1, tape->level);
    } else {
        PyObject *order = tape->order;
        Py_XINCREF(order);
        Py_INCREF(tensor);
        Py_BEGIN_ALLOW_THREADS
        tape->measure(&job, &row->result, 1, tape->level);
        Py_END_ALLOW_THREADS
        Py_DECREF(tensor);
        Py_XDECREF(order);
    }
    if (!tape->order) return 0; /* another thread has ended the step */
    PyObject *number = PyLong_FromSsize_t(index);
    PyObject *pair = number ? PyTuple_Pack(2, number, tape->emit) : NULL;
    Py_XDECREF(number);
    int failed = !pair || PyList_Append(tape->order, pair);
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

static int tape_traverse(PyObject *self, visitproc visit, void *arg)
{
    Tape *tape = (Tape *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(tape->order);
    Py_VISIT(tape->emit);
    Py_VISIT(tape->call_type);
    Py_VISIT(tape->gradient_type);
    Py_VISIT(tape->trained);
    for (Py_ssize_t index = 0; index < tape->used; index++)
        Py_VISIT(tape->pages[index / ROWS][index % ROWS].site);
    return 0;
}

static int tape_clear(PyObject *self)
{
    Tape *tape = (Tape *)self;
    tape->is_open = 0;
    Py_CLEAR(tape->order);
    Py_CLEAR(tape->emit);
    Py_CLEAR(tape->call_type);
    Py_CLEAR(tape->gradient_type);
    Py_CLEAR(tape->trained);
    return 0;
}

static void tape_dealloc(PyObject *self)
{
    Tape *tape = (Tape *)self;
    PyObject_GC_UnTrack(self);
    tape_clear(self);
    for (Py_ssize_t index = 0; index < tape->used; index++)
        Py_XDECREF(tape->pages[index / ROWS][index % ROWS].site);
    for (Py_ssize_t page = 0; page < tape->page_count; page++) free(tape->pages[page]);
    free(tape->pages);
    release(self);
}

/* Tape(order, emit, call_type, gradient_type, measure, level, forward, backward, gradient_limits,
   trained, max_calls); `trained` is a weak reference to the model, or None */
static PyObject *tape_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *order, *emit, *calls, *gradients, *trained;
    unsigned long long measure;
    long long max_calls;
    int level, forward, backward;
    const char *bytes;
    Py_ssize_t size;
    if (!exchange || (names && PyDict_Size(names))) {
        PyErr_SetString(PyExc_TypeError, "prepare() comes first, and no names are taken");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!OO!O!Kippy#OL", &PyList_Type, &order, &emit, &PyType_Type, &calls,
                          &PyType_Type, &gradients, &measure, &level, &forward, &backward, &bytes,
                          &size, &trained, &max_calls))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)gradients, gradient_type)
        || !PyType_IsSubtype((PyTypeObject *)calls, call_type)
        || (trained != Py_None && !PyWeakref_CheckRef(trained))) {
        PyErr_SetString(PyExc_TypeError, "a Call, a Gradient and a weak reference are needed");
        return NULL;
    }
    Tape *tape = (Tape *)PyType_GenericAlloc(type, 0);
    if (!tape) return NULL;
    tape->is_open = 1;
    tape->order = Py_NewRef(order);
    tape->emit = Py_NewRef(emit);
    tape->call_type = Py_NewRef(calls);
    tape->gradient_type = Py_NewRef(gradients);
    tape->measure = (Measure)(uintptr_t)measure;
    tape->level = level;
    if (trained != Py_None) tape->trained = Py_NewRef(trained);
    tape->max_calls = max_calls;
    tape->forward = (char)forward;
    tape->backward = (char)backward;
    if (take_limits(tape->gradient_limits, bytes, size)) Py_CLEAR(tape);
    return (PyObject *)tape;
}

static PyObject *tape_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    Tape *tape = (Tape *)self;
    tape->is_open = 0;
    Py_CLEAR(tape->order);
    Py_CLEAR(tape->emit);
    Py_RETURN_NONE;
}

/* A row as (site, is_forward, call_index, micro_batch, fired, time_us, shape, count, units, result). */
static PyObject *tape_read(PyObject *self, PyObject *argument)
{
    Tape *tape = (Tape *)self;
    Py_ssize_t index = PyLong_AsSsize_t(argument);
    if (index == -1 && PyErr_Occurred()) return NULL;
    if (index < 0 || index >= tape->used) {
        PyErr_SetString(PyExc_IndexError, "no such row");
        return NULL;
    }
    Row *row = &tape->pages[index / ROWS][index % ROWS];
    return Py_BuildValue("(OOLLLLNLLN)", row->site, row->is_forward ? Py_True : Py_False,
                         (long long)row->call_index, (long long)row->micro_batch,
                         (long long)row->fired, (long long)row->time_us,
                         describe_shape(row->shape, row->ndim), (long long)row->count,
                         (long long)row->units, describe_result(&row->result));
}

static PyMemberDef tape_members[] = {
    {"is_open", T_BOOL, offsetof(Tape, is_open), READONLY, "Whether hooks still take anything."},
    {"saw_backward", T_BOOL, offsetof(Tape, saw_backward), 0, "Whether gradients came since the last forward."},
    {"spent_ns", T_LONGLONG, offsetof(Tape, spent_ns), 0, "Time that the hooks took."},
    {"calls", T_LONGLONG, offsetof(Tape, calls), 0, "Calls of modules that were seen."},
    {"micro_batch", T_LONGLONG, offsetof(Tape, micro_batch), 0, "Backward passes before this forward."},
    {"evaluations", T_LONGLONG, offsetof(Tape, evaluations), 0, "Calls left out: they are no training."},
    {"surplus", T_LONGLONG, offsetof(Tape, surplus), 0, "Calls left out: their module had too many."},
    {"late", T_LONGLONG, offsetof(Tape, late), 0, "Gradients that came after the step."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef tape_methods[] = {
    {"make_call", (PyCFunction)(void (*)(void))tape_make_call, METH_FASTCALL, "A forward hook."},
    {"close", tape_close, METH_NOARGS, "Take no more."},
    {"read", tape_read, METH_O, "A row, by its number."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tape_slots[] = {
    {Py_tp_doc, "What the hooks of one probed step have read."},
    {Py_tp_new, tape_new},
    {Py_tp_dealloc, tape_dealloc},
    {Py_tp_traverse, tape_traverse},
    {Py_tp_clear, tape_clear},
    {Py_tp_members, tape_members},
    {Py_tp_methods, tape_methods},
    {0, NULL},
};

static PyType_Spec tape_spec = {"quark_torch.kernels.probing.Tape", sizeof(Tape), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tape_slots};
