/* What a hook does with an ordinary tensor, without Python's interpreter.

   A probed step is a Tape. A forward hook asks its Call, and a gradient's hook
   is a Gradient, to take a tensor: it is read by the kernel of lean.c into a
   row of the tape, and records are made of the rows after the step. Whatever is
   not ordinary is left to the caller, untouched, by answering False.

   Tensors are seen through the DLPack exchange table that PyTorch has had since
   2.10, without a line of its headers, and Python through its stable ABI, so
   that one library does for every Python from 3.11 and every such PyTorch. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#define INTERFACE 1
#define ROWS 64
#define DIMS 8
/* Reading fewer elements than this takes less time than giving the interpreter's lock away. */
#define FEW (1 << 18)

enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, DTYPES };
enum { NO_UNITS = -1 };
enum { ANY, CHANNELS, FEATURES };

/* ---- As in lean.c. ---- */

typedef struct {
    const void *data, *before;
    int64_t count, dtype, wanted;
    double near_zero, low, high;
    int64_t outer, units, inner;
    uint64_t near_zero_bits;
} Job;

typedef struct {
    int64_t finite, nan, inf, near_zero, saturated, dead;
    double mean, squares, minimum, maximum, before_squares;
} Result;

typedef void (*Measure)(const Job *, Result *, int64_t, int);

/* ---- As in dlpack.h, major version 1. ---- */

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} View;

typedef struct Exchange {
    uint32_t major, minor;
    struct Exchange *previous;
    void *allocate, *to_managed, *from_managed;
    int (*view)(void *tensor, View *out);
} Exchange;

/* ---- What is asked of PyTorch; set once by prepare(). ---- */

static PyObject *tensor_type, *parameter_type, *get_tracing, *peek_transforms, *has_function_mode, *get_graph_task,
    *is_grad_enabled, *is_neg, *ordered_dict;
static Exchange *exchange;
static int64_t next_hook = -1;

static PyObject *s_failed, *s_was_called, *s_requires_grad, *s_grad_fn, *s_backward_hooks,
    *s_register_hook_dict;

/* What is wanted, as the kernel takes it; one for each dtype. */
typedef struct {
    int64_t wanted;
    double near_zero, low, high;
    uint64_t near_zero_bits;
} Limits;

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
    Measure measure;
    Row **pages;
    Py_ssize_t used, page_count;
    long long spent_ns, calls, micro_batch;
    int level;
    char is_open, saw_backward, forward, backward;
    Limits gradient_limits[DTYPES];
} Tape;

typedef struct {
    PyObject_HEAD
    Tape *tape;
    PyObject *probed, *site, *module, *calls;
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

static PyTypeObject *tape_type, *gradient_type, *call_type;

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

/* What is not ordinary goes to Python, which meets the same error where there is one. */
static int leave(void)
{
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- Looking at a tensor. ---- */

static int find_dtype(const View *view)
{
    if (view->lanes != 1) return -1;
    if (view->code == 2 && view->bits == 32) return FLOAT32;
    if (view->code == 2 && view->bits == 16) return FLOAT16;
    if (view->code == 4 && view->bits == 16) return BFLOAT16;
    return -1; /* of float64 the squares may leave the range, so that it may have to be read again */
}

/* Elements, if the memory has no gaps and no element is there twice; else 0. */
static int64_t count_dense(const View *view)
{
    int order[DIMS], dims = 0;
    int64_t count = 1;
    for (int dim = 0; dim < view->ndim; dim++) {
        int64_t size = view->shape[dim];
        if (size < 1) return 0;
        if (size == 1) continue;
        int place = dims++;
        for (; place > 0 && view->strides[order[place - 1]] > view->strides[dim]; place--)
            order[place] = order[place - 1];
        order[place] = dim;
    }
    for (int place = 0; place < dims; place++) {
        if (view->strides[order[place]] != count) return 0;
        count *= view->shape[order[place]];
    }
    return count;
}

/* 1 of a tensor that the kernel may read; 0 of another; -1 with an exception. */
static int look_at(PyObject *tensor, View *view, int64_t *count, int *dtype)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != tensor_type && type != parameter_type) return 0;
    memset(view, 0, sizeof *view);
    if (exchange->view(tensor, view) != 0) return leave();
    if (view->device_type != 1 || view->ndim > DIMS || (view->ndim && (!view->shape || !view->strides)))
        return 0;
    *dtype = find_dtype(view);
    if (*dtype < 0 || !(*count = count_dense(view)) || !view->data) return 0;
    view->data = (char *)view->data + view->byte_offset;
    PyObject *neg = PyObject_CallFunctionObjArgs(is_neg, tensor, NULL);
    if (!neg) return leave();
    Py_DECREF(neg);
    return neg == Py_False;
}

static int64_t choose_unit_dim(const View *view, int64_t count, int layout)
{
    int dims = view->ndim;
    if (dims < 2) return NO_UNITS;
    if (layout == CHANNELS || (layout == ANY && dims > 3)) return view->shape[0] > 1 ? 1 : NO_UNITS;
    return count / view->shape[dims - 1] > 1 ? dims - 1 : NO_UNITS;
}

/* ---- The tape. ---- */

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

static int take_limits(Limits *limits, const char *bytes, Py_ssize_t size)
{
    if (size != (Py_ssize_t)(DTYPES * sizeof *limits)) {
        PyErr_SetString(PyExc_ValueError, "limits of another size");
        return -1;
    }
    memcpy(limits, bytes, (size_t)size);
    return 0;
}

/* Tape(order, emit, call_type, gradient_type, measure, level, forward, backward, gradient_limits) */
static PyObject *tape_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *order, *emit, *calls, *gradients;
    unsigned long long measure;
    int level, forward, backward;
    const char *bytes;
    Py_ssize_t size;
    if (!exchange || (names && PyDict_Size(names))) {
        PyErr_SetString(PyExc_TypeError, "prepare() comes first, and no names are taken");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!OO!O!Kippy#", &PyList_Type, &order, &emit, &PyType_Type, &calls,
                          &PyType_Type, &gradients, &measure, &level, &forward, &backward, &bytes,
                          &size))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)gradients, gradient_type)
        || !PyType_IsSubtype((PyTypeObject *)calls, call_type)) {
        PyErr_SetString(PyExc_TypeError, "a Call and a Gradient are needed");
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
    tape->forward = (char)forward;
    tape->backward = (char)backward;
    if (take_limits(tape->gradient_limits, bytes, size)) Py_CLEAR(tape);
    return (PyObject *)tape;
}

/* make_call(probed, site, module, calls, layout, limits); `module` is a weak reference */
static PyObject *tape_make_call(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Tape *tape = (Tape *)self;
    char *bytes;
    Py_ssize_t size;
    if (given != 6 || !tape->call_type || !PyWeakref_CheckRef(args[2]) || !PyIter_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "make_call() got something else");
        return NULL;
    }
    long layout = PyLong_AsLong(args[4]);
    if ((layout == -1 && PyErr_Occurred()) || PyBytes_AsStringAndSize(args[5], &bytes, &size)) return NULL;
    Call *call = (Call *)PyType_GenericAlloc((PyTypeObject *)tape->call_type, 0);
    if (!call) return NULL;
    call->tape = (Tape *)Py_NewRef(self);
    call->probed = Py_NewRef(args[0]);
    call->site = Py_NewRef(args[1]);
    call->module = Py_NewRef(args[2]);
    call->calls = Py_NewRef(args[3]);
    call->layout = (int)layout;
    if (take_limits(call->limits, bytes, size)) Py_CLEAR(call);
    return (PyObject *)call;
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

static PyObject *describe_result(const Result *of)
{
    return Py_BuildValue("(LLLLLLddddd)", (long long)of->finite, (long long)of->nan, (long long)of->inf,
                         (long long)of->near_zero, (long long)of->saturated, (long long)of->dead,
                         of->mean, of->squares, of->minimum, of->maximum, of->before_squares);
}

static PyObject *describe_shape(const int64_t *sizes, int dims)
{
    PyObject *shape = PyTuple_New(dims);
    for (int dim = 0; shape && dim < dims; dim++) {
        PyObject *size = PyLong_FromLongLong(sizes[dim]);
        if (!size) Py_CLEAR(shape);
        else PyTuple_SetItem(shape, dim, size);
    }
    return shape;
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

static PyMemberDef gradient_members[] = {
    {"probed", T_OBJECT_EX, offsetof(Gradient, probed), READONLY, NULL},
    {"site", T_OBJECT_EX, offsetof(Gradient, site), READONLY, NULL},
    {"call_index", T_LONGLONG, offsetof(Gradient, call_index), READONLY, NULL},
    {"micro_batch", T_LONGLONG, offsetof(Gradient, micro_batch), READONLY, NULL},
    {"fired", T_LONGLONG, offsetof(Gradient, fired), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef gradient_methods[] = {
    {"take", gradient_take, METH_O, "Read a gradient; False where Python must."},
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
    if ((answer = is_ordinary(&grad_enabled)) != 1 || (tape->backward && !grad_enabled)
        || (answer = look_at(tensor, &view, &count, &dtype)) != 1)
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
    if (tape->forward) {
        Row meta = {.site = call->site, .call_index = index, .micro_batch = micro_batch, .is_forward = 1};
        int64_t unit_dim = choose_unit_dim(&view, count, call->layout);
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

/* ---- The module. ---- */

/* prepare(table, Tensor, Parameter, is_neg, get_tracing, peek_transforms, has_function_mode, get_graph_task,
   is_grad_enabled, OrderedDict) */
static PyObject *prepare(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *table, *found[9];
    PyObject **places[9] = {&tensor_type, &parameter_type, &is_neg, &get_tracing, &peek_transforms,
                            &has_function_mode, &get_graph_task, &is_grad_enabled, &ordered_dict};
    if (!PyArg_ParseTuple(args, "OOOOOOOOOO", &table, &found[0], &found[1], &found[2], &found[3],
                          &found[4], &found[5], &found[6], &found[7], &found[8]))
        return NULL;
    Exchange *offered = PyCapsule_GetPointer(table, "dlpack_exchange_api");
    if (!offered) return NULL;
    while (offered && offered->major > 1) offered = offered->previous;
    if (!offered || offered->major != 1 || !offered->view) {
        PyErr_SetString(PyExc_RuntimeError, "another version of DLPack");
        return NULL;
    }
    for (int each = 0; each < 9; each++) {
        PyObject *old = *places[each];
        *places[each] = Py_NewRef(found[each]);
        Py_XDECREF(old);
    }
    exchange = offered; /* which lives as long as its library does */
    Py_RETURN_NONE;
}

/* look(tensor) -> (address, count, dtype, shape) of a tensor that may be read, else None */
static PyObject *look(PyObject *self, PyObject *tensor)
{
    (void)self;
    View view;
    int64_t count;
    int dtype, answer;
    if (!exchange) Py_RETURN_NONE;
    if ((answer = look_at(tensor, &view, &count, &dtype)) < 0) return NULL;
    if (!answer) Py_RETURN_NONE;
    return Py_BuildValue("(KLiN)", (unsigned long long)(uintptr_t)view.data, (long long)count, dtype,
                         describe_shape(view.shape, view.ndim));
}

static int is_same_memory(const View *one, const View *other)
{
    if (one->ndim != other->ndim) return 0;
    for (int dim = 0; dim < one->ndim; dim++)
        if (one->shape[dim] != other->shape[dim]
            || (one->shape[dim] > 1 && one->strides[dim] != other->strides[dim]))
            return 0;
    return 1;
}

/* Jobs of the tensors that may be read, and where they are in the list; how many, or -1. */
static Py_ssize_t make_jobs(PyObject *tensors, PyObject *befores, const Limits *limits, Job *jobs,
                            Py_ssize_t *places, int64_t *total)
{
    Py_ssize_t used = 0, given = PyTuple_Size(tensors);
    for (Py_ssize_t place = 0; place < given; place++) {
        View view, before = {0};
        int64_t count, before_count;
        int dtype, before_dtype;
        int answer = look_at(PyTuple_GetItem(tensors, place), &view, &count, &dtype);
        if (answer > 0 && befores) {
            answer = look_at(PyTuple_GetItem(befores, place), &before, &before_count, &before_dtype);
            if (answer > 0) answer = dtype == before_dtype && is_same_memory(&view, &before);
        }
        if (answer < 0) return -1;
        if (!answer) continue;
        const Limits *own = &limits[dtype];
        jobs[used] = (Job){view.data, before.data, count, dtype, own->wanted, own->near_zero, own->low,
                           own->high, 0, 0, 0, own->near_zero_bits};
        places[used++] = place;
        *total += count;
    }
    return used;
}

/* measure(tensors, befores or None, measure, level, limits) -> list of (count, result, that of the
   tensor where the first is of an update), or None for a tensor that Python must read */
static PyObject *measure(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *tensors, *befores, *found = NULL;
    unsigned long long address;
    int level;
    Limits limits[DTYPES];
    const char *bytes;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "O!OKiy#", &PyTuple_Type, &tensors, &befores, &address, &level, &bytes, &size)
        || take_limits(limits, bytes, size))
        return NULL;
    Py_ssize_t given = PyTuple_Size(tensors);
    if (befores == Py_None) befores = NULL;
    if (!exchange || (befores && (!PyTuple_Check(befores) || PyTuple_Size(befores) != given))) {
        PyErr_SetString(PyExc_TypeError, "prepare() comes first, and each tensor has one before it");
        return NULL;
    }
    Py_ssize_t each = befores ? 2 : 1;
    Job *jobs = malloc((size_t)(given + 1) * sizeof *jobs);
    Py_ssize_t *places = malloc((size_t)(given + 1) * sizeof *places);
    Result *results = malloc((size_t)(given * each + 1) * sizeof *results);
    if (!jobs || !places || !results) {
        PyErr_NoMemory();
        goto end;
    }
    int64_t total = 0;
    Py_ssize_t used = make_jobs(tensors, befores, limits, jobs, places, &total);
    if (used < 0) goto end;
    /* The tuples keep the tensors meanwhile. */
    if (total < FEW) {
        ((Measure)(uintptr_t)address)(jobs, results, used, level);
    } else {
        Py_BEGIN_ALLOW_THREADS
        ((Measure)(uintptr_t)address)(jobs, results, used, level);
        Py_END_ALLOW_THREADS
    }
    if (!(found = PyList_New(given))) goto end;
    for (Py_ssize_t place = 0, row = 0; place < given; place++) {
        PyObject *item = Py_NewRef(Py_None);
        if (row < used && places[row] == place) {
            Py_DECREF(item);
            const Result *of = results + row * each;
            item = befores ? Py_BuildValue("(LNN)", (long long)jobs[row].count, describe_result(of),
                                           describe_result(of + 1))
                           : Py_BuildValue("(LN)", (long long)jobs[row].count, describe_result(of));
            row++;
        }
        if (!item) {
            Py_CLEAR(found);
            goto end;
        }
        PyList_SetItem(found, place, item);
    }
end:
    free(jobs);
    free(places);
    free(results);
    return found;
}

static PyMethodDef functions[] = {
    {"prepare", prepare, METH_VARARGS, "Take up what is asked of PyTorch."},
    {"look", look, METH_O, "What is seen of a tensor."},
    {"measure", measure, METH_VARARGS, "Read tensors, or the updates that made them."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type && PyModule_AddObjectRef(module, name, type) < 0) Py_CLEAR(type);
    return (PyTypeObject *)type; /* this reference stays */
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "probing", NULL, -1, functions,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_probing(void)
{
    struct {
        PyObject **place;
        const char *text;
    } names[] = {
        {&s_failed, "failed"}, {&s_was_called, "was_called"}, {&s_requires_grad, "requires_grad"},
        {&s_grad_fn, "grad_fn"}, {&s_backward_hooks, "_backward_hooks"},
        {&s_register_hook_dict, "_register_hook_dict"},
    };
    for (size_t each = 0; each < sizeof names / sizeof *names; each++)
        if (!(*names[each].place = PyUnicode_InternFromString(names[each].text))) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    gradient_type = add_type(module, &gradient_spec, "Gradient");
    call_type = gradient_type ? add_type(module, &call_spec, "Call") : NULL;
    tape_type = call_type ? add_type(module, &tape_spec, "Tape") : NULL;
    if (!tape_type
        || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        Py_CLEAR(module);
    return module;
}
