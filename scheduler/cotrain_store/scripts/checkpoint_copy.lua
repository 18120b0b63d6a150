-- checkpoint_copy: add a second name for stored weights, in a new closed run without a log.
-- Idempotent: returns the existing record.
-- needs: checkpoint_index, records
local args = cjson.decode(ARGV[1])
local copy = cjson.decode(args.checkpoint)
local record_key, checkpoint = 'cotrain:run:' .. args.run, 'cotrain:checkpoint:' .. member_of(copy)

local known = redis.call('GET', checkpoint)
if known or redis.call('EXISTS', record_key) == 1 then
  return known or 'CONFLICT'
end
local original = redis.call('GET', 'cotrain:checkpoint:' .. args.source)
if not original then
  return 'GONE'
end
original = cjson.decode(original)
if original.weights ~= copy.weights or not (original.public or original.tenant == args.reader) then
  return 'GONE'
end
redis.call('HSET', record_key, 'record', args.record, 'state', 'closed')
count_record(copy.tenant, args.record)
redis.call('SADD', 'cotrain:session:' .. args.session .. ':runs', args.run)
redis.call('ZADD', 'cotrain:tenant:' .. copy.tenant .. ':training_runs', args.created_at, args.run)
redis.call('ZADD', 'cotrain:training_runs', args.created_at, args.run)
write_checkpoint(args.checkpoint, copy)
return args.checkpoint
