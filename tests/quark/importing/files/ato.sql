BEGIN TRANSACTION;
CREATE TABLE artifacts (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	path VARCHAR NOT NULL, 
	data_type VARCHAR, 
	data_info JSON, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES experiments (id)
);
INSERT INTO "artifacts" VALUES(1,1,'out/model.bin','model','{"size": 3}');
INSERT INTO "artifacts" VALUES(2,1,'/etc/hostname','file','null');
INSERT INTO "artifacts" VALUES(3,2,'out/model.bin','model','{"size": 3}');
INSERT INTO "artifacts" VALUES(4,2,'/etc/hostname','file','null');
INSERT INTO "artifacts" VALUES(5,3,'out/model.bin','model','{"size": 3}');
INSERT INTO "artifacts" VALUES(6,3,'/etc/hostname','file','null');
CREATE TABLE experiments (
	id INTEGER NOT NULL, 
	project_id INTEGER NOT NULL, 
	config JSON NOT NULL, 
	structural_hash VARCHAR(64), 
	tags JSON, 
	status VARCHAR, 
	start_time DATETIME, 
	end_time DATETIME, 
	PRIMARY KEY (id), 
	FOREIGN KEY(project_id) REFERENCES projects (id)
);
INSERT INTO "experiments" VALUES(1,1,'{"experiment": {"project_name": "vision", "sql": {"db_path": "sqlite:////data/experiments.db"}}, "lr": 0.1, "model": {"name": "resnet", "layers": [1, 2, 3]}, "api_key": "hunter2hunter2"}','7bd89e4aa7935aff7aaf9711abf65ec298772e07','["base", "n0"]','completed','2026-11-24 19:35:56.213110','2026-11-24 19:35:56.388265');
INSERT INTO "experiments" VALUES(2,1,'{"experiment": {"project_name": "vision", "sql": {"db_path": "sqlite:////data/experiments.db"}}, "lr": 0.05, "model": {"name": "resnet", "layers": [1, 2, 3]}, "api_key": "hunter2hunter2"}','7bd89e4aa7935aff7aaf9711abf65ec298772e07','["base", "n1"]','failed','2026-11-24 19:35:56.395279','2026-11-24 19:35:56.597295');
INSERT INTO "experiments" VALUES(3,1,'{"experiment": {"project_name": "vision", "sql": {"db_path": "sqlite:////data/experiments.db"}}, "lr": 0.03333333333333333, "model": {"name": "resnet", "layers": [1, 2, 3]}, "api_key": "hunter2hunter2"}','7bd89e4aa7935aff7aaf9711abf65ec298772e07','["base", "n2"]','running','2026-11-24 19:35:56.618119',NULL);
CREATE TABLE fingerprints (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	trace_id VARCHAR NOT NULL, 
	trace_type VARCHAR(32) NOT NULL, 
	fingerprint VARCHAR(128) NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES experiments (id)
);
INSERT INTO "fingerprints" VALUES(1,1,'train_step','static','abababababababababababababababababababababababababababababababab');
INSERT INTO "fingerprints" VALUES(2,1,'predict','runtime','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd');
INSERT INTO "fingerprints" VALUES(3,2,'train_step','static','abababababababababababababababababababababababababababababababab');
INSERT INTO "fingerprints" VALUES(4,2,'predict','runtime','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd');
INSERT INTO "fingerprints" VALUES(5,3,'train_step','static','abababababababababababababababababababababababababababababababab');
INSERT INTO "fingerprints" VALUES(6,3,'predict','runtime','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd');
CREATE TABLE metrics (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	"key" VARCHAR NOT NULL, 
	value FLOAT NOT NULL, 
	step INTEGER NOT NULL, 
	timestamp DATETIME, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES experiments (id)
);
INSERT INTO "metrics" VALUES(1,1,'loss',1.0,0,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(2,1,'val/acc',0.0,0,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(3,1,'loss',0.5,1,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(4,1,'val/acc',0.1,1,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(5,1,'loss',3.33333333333333314829e-01,2,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(6,1,'val/acc',0.2,2,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(7,1,'loss',0.25,3,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(8,1,'val/acc',0.3,3,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(9,2,'loss',2.0,0,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(10,2,'val/acc',0.0,0,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(11,2,'loss',1.5,1,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(12,2,'val/acc',0.1,1,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(13,2,'loss',1.33333333333333325931e+00,2,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(14,2,'val/acc',0.2,2,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(15,2,'loss',1.25,3,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(16,2,'val/acc',0.3,3,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(17,2,'loss',1.2,4,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(18,2,'val/acc',0.4,4,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(19,3,'loss',3.0,0,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(20,3,'val/acc',0.0,0,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(21,3,'loss',2.5,1,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(22,3,'val/acc',0.1,1,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(23,3,'loss',2.33333333333333348136e+00,2,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(24,3,'val/acc',0.2,2,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(25,3,'loss',2.25,3,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(26,3,'val/acc',0.3,3,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(27,3,'loss',2.2,4,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(28,3,'val/acc',0.4,4,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(29,3,'loss',2.16666666666666651863e+00,5,'2026-11-24 19:35:55.931243');
INSERT INTO "metrics" VALUES(30,3,'val/acc',0.5,5,'2026-11-24 19:35:55.931243');
CREATE TABLE projects (
	id INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	description TEXT, 
	created_at DATETIME, 
	PRIMARY KEY (id)
);
INSERT INTO "projects" VALUES(1,'vision',NULL,'2026-11-24 19:35:56.201517');
CREATE UNIQUE INDEX ix_projects_name ON projects (name);
CREATE INDEX ix_experiments_status ON experiments (status);
CREATE INDEX ix_experiments_structural_hash ON experiments (structural_hash);
CREATE INDEX ix_experiments_project_id ON experiments (project_id);
CREATE INDEX ix_metrics_key ON metrics ("key");
CREATE INDEX ix_metrics_run_id ON metrics (run_id);
CREATE INDEX ix_artifacts_run_id ON artifacts (run_id);
CREATE INDEX ix_fingerprints_trace_id ON fingerprints (trace_id);
CREATE INDEX ix_fingerprints_trace_type ON fingerprints (trace_type);
CREATE INDEX ix_fingerprints_run_id ON fingerprints (run_id);
CREATE INDEX ix_fingerprints_fingerprint ON fingerprints (fingerprint);
COMMIT;
