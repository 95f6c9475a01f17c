/* Part of probing.c: how a tensor is seen, and what the kernel is asked of it. */

#define DIMS 8
/* Reading fewer elements than this takes less time than giving the interpreter's lock away. */
#define FEW (1 << 18)

enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, DTYPES };
enum { NO_UNITS = -1 };
enum { ASKED, CHANNELS, FEATURES }; /* with four times the only number of dimensions, or 0 for any */

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
    double mean, squares, minimum, maximum, before_squares, variation;
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

static PyObject *tensor_type, *parameter_type, *get_tracing, *peek_transforms, *has_function_mode,
    *get_graph_task, *is_grad_enabled, *is_neg, *ordered_dict;
static Exchange *exchange;

/* What is wanted, as the kernel takes it; one for each dtype. */
typedef struct {
    int64_t wanted;
    double near_zero, low, high;
    uint64_t near_zero_bits;
} Limits;

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
    /* First, since a mode of PyTorch may run Python here, and the view points into the tensor. */
    PyObject *neg = PyObject_CallFunctionObjArgs(is_neg, tensor, NULL);
    if (!neg) return leave();
    Py_DECREF(neg);
    if (neg != Py_False) return 0;
    memset(view, 0, sizeof *view);
    if (exchange->view(tensor, view) != 0) return leave();
    if (view->device_type != 1 || view->ndim > DIMS || (view->ndim && (!view->shape || !view->strides)))
        return 0;
    *dtype = find_dtype(view);
    if (*dtype < 0 || !(*count = count_dense(view)) || !view->data) return 0;
    view->data = (char *)view->data + view->byte_offset;
    return 1;
}

static int64_t choose_unit_dim(const View *view, int64_t count, int layout)
{
    int dims = view->ndim;
    if (dims < 2 || (layout >> 2 && layout >> 2 != dims)) return NO_UNITS;
    if ((layout & 3) == CHANNELS) return view->shape[0] > 1 ? 1 : NO_UNITS;
    return count / view->shape[dims - 1] > 1 ? dims - 1 : NO_UNITS;
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

static PyObject *describe_result(const Result *of)
{
    return Py_BuildValue("(LLLLLLdddddd)", (long long)of->finite, (long long)of->nan, (long long)of->inf,
                         (long long)of->near_zero, (long long)of->saturated, (long long)of->dead,
                         of->mean, of->squares, of->minimum, of->maximum, of->before_squares,
                         of->variation);
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
